"""Formats of KV caches at rest: which byte holds which element, written down as data."""

from .agreement import Agreement as Agreement
from .agreement import agree as agree
from .audits import Audit as Audit
from .audits import AuditFailure as AuditFailure
from .audits import Flaw as Flaw
from .audits import Watch as Watch
from .audits import audit as audit
from .catalogue import CATALOGUE as CATALOGUE
from .catalogue import Known as Known
from .catalogue import known_format as known_format
from .conversion import Conversion as Conversion
from .conversion import convert as convert
from .copies import Copies as Copies
from .field import Field as Field
from .field import Piece as Piece
from .format import Format as Format
from .identification import Identified as Identified
from .identification import identify as identify
from .identification import markers as markers
from .stored import STORED as STORED
from .stored import Stored as Stored
from .transfers import Proof as Proof
from .transfers import Ranks as Ranks
from .transfers import Transfer as Transfer
from .transfers import heads_of_ranks as heads_of_ranks
from .transfers import transfer as transfer

__all__ = [
    "CATALOGUE", "STORED", "Agreement", "Audit", "AuditFailure", "Conversion", "Copies", "Field", "Flaw", "Format",
    "Identified", "Known", "Piece", "Proof", "Ranks", "Stored", "Transfer", "Watch", "agree", "audit", "convert",
    "heads_of_ranks", "identify", "known_format", "markers", "transfer",
]
