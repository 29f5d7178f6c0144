"""Programs: PyTorch calls that are recorded once and replayed. See README.md here."""

from autogram._blocks.programs.known import Programs, are_plain, forms, settings_now
from autogram._blocks.programs.program import QUESTIONS, Program, is_writing, written_down
