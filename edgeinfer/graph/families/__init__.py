"""Model families: their registry, and the names that files give to their parts."""
