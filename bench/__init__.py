"""Load generation, baselines and reports."""
