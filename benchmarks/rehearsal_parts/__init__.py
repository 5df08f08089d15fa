"""Cases of the benchmark of rehearsals, and what runs them on the pretend device."""
