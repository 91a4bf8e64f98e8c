"""What a run says about itself: records, traces, diagnosis, reports; and faults on purpose. Training imports it."""
