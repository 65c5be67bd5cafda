"""Legal variants: other results to the bit, and no fault. A verdict other than ready is a false alarm."""
