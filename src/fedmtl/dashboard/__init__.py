"""A local web page over run folders: it reads them as they grow, and writes nothing."""
