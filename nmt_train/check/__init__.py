"""nmt-train --check: everything cheap that can be known before training, on one page."""
