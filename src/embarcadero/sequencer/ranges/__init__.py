"""Keep what is ordered on enough disks: open ranges, their seals, and lanes that come back after a loss."""
