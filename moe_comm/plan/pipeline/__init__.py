"""Pipeline schedules: which stages they need, which layers each stage holds, in which order its passes run."""
