"""What proves Embarcadero. The product never imports it, and the wheel does not contain it."""
