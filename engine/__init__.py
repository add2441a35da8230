"""One model on one device: requests, KV blocks, scheduler, runner, sampler. Knows no network."""
