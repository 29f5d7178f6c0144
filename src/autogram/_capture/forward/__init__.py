"""The forward side: torch calls are recorded, and taps are put where parameters meet samples."""
