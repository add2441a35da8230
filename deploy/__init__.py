"""Ray cluster, command line, manifests. The only package that imports ray."""
