"""What is found in the graph of a compiled part while AOTAutograd traces it. See README.md here."""
