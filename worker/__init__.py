"""What a worker process has once, whichever role it serves: engine thread, epoch, state feed, wiring."""
