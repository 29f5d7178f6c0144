"""Capture: records the uses of parameters, and shows their cotangents. See README.md here."""
