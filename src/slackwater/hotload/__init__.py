"""Hot-load operations over a fleet: the machines, the conductor and its ledger, the native and two foreign fronts."""
