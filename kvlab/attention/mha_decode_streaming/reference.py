"""Streaming MHA decode as mathematics: that of MHA decode."""

from __future__ import annotations

from kvlab.attention.mha_decode.reference import reference as reference
