"""Load generation against a running cluster, and the bars the project holds itself to."""
