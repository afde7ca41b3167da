"""Formats of KV caches at rest: which byte holds which element, written down as data."""

from .agreement import Agreement as Agreement
from .agreement import agree as agree
from .audits import Audit as Audit
from .audits import Flaw as Flaw
from .audits import audit as audit
from .budget.budgets import CardFit as CardFit
from .budget.budgets import KVBudget as KVBudget
from .budget.budgets import KVRequest as KVRequest
from .budget.budgets import LayerBytes as LayerBytes
from .budget.budgets import kv_budget as kv_budget
from .budget.groups import KVGroup as KVGroup
from .budget.models import MODELS as MODELS
from .budget.models import PublicModel as PublicModel
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
from .watching import AuditFailure as AuditFailure
from .watching import Watch as Watch

__all__ = [
    "CATALOGUE", "MODELS", "STORED", "Agreement", "Audit", "AuditFailure", "CardFit", "Conversion", "Copies", "Field",
    "Flaw", "Format", "Identified", "KVBudget", "KVGroup", "KVRequest", "Known", "LayerBytes", "Piece", "Proof",
    "PublicModel", "Ranks", "Stored", "Transfer", "Watch", "agree", "audit", "convert", "heads_of_ranks", "identify",
    "known_format", "kv_budget", "markers", "transfer",
]
