"""Formats of KV caches at rest: which byte holds which element, written down as data."""

from .catalogue import CATALOGUE as CATALOGUE
from .catalogue import Known as Known
from .catalogue import known_format as known_format
from .field import Field as Field
from .field import Piece as Piece
from .format import Format as Format
from .stored import STORED as STORED
from .stored import Stored as Stored

__all__ = ["CATALOGUE", "STORED", "Field", "Format", "Known", "Piece", "Stored", "known_format"]
