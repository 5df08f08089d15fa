"""The scheduler of the pool: watches, decides, applies, reclaims. Jobs queue up here."""
