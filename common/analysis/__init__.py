"""Records read back as typed rows; ratios, intervals, verdicts. No torch, no numpy."""
