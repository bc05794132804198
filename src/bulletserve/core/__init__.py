"""The vocabulary: frozen dataclasses and arithmetic. No I/O, no clock, standard library only."""
