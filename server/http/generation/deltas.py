"""Parsing of an answer's pieces into what the model says with them."""

from collections.abc import Sequence

from server.http.generation.pieces import Piece
from server.text.answer.deltas import ContentText, Delta


def deltas_of(piece: Piece) -> Sequence[Delta]:
    """The deltas of a piece, whether its answer is parsed or all of it is content."""
    return [ContentText(piece.text), *piece.deltas] if piece.text else piece.deltas
