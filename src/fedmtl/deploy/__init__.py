"""A run over machines: the server, the sites, what a site allows and what it is sent."""
