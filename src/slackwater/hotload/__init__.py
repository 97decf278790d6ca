"""Hot-load operations over a fleet: the machine, the conductor, the native front."""
