"""`ddrl web`: the runs, the fleet and their curves in a browser."""
