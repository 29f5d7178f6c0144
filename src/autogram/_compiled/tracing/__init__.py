"""Records the graph of a compiled part while AOTAutograd traces it. See README.md here."""
