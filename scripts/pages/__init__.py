"""The pages of the site that are made when it is built: the zoo, from the registry, and the benchmarks, from recorded runs."""
