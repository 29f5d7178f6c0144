"""Programs: calls of PyTorch that are chosen once and made again. See README.md here."""

from autogram._blocks.programs.known import Programs, are_plain, forms, settings_now
from autogram._blocks.programs.program import QUESTIONS, Program, is_writing, written_down

__all__ = [
    "QUESTIONS",
    "Program",
    "Programs",
    "are_plain",
    "forms",
    "is_writing",
    "settings_now",
    "written_down",
]
