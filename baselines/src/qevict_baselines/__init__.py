"""Published eviction methods, one paper per file; each file has a preset and the parts that the paper adds."""
