"""Many token data sets into one seeded training mix with a held-out share."""
