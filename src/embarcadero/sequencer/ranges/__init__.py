"""Keep ordered entries on enough disks: open ranges, seals, and the recovery of lanes after a loss."""
