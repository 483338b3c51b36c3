"""Scale-out on Ray: explorers that are started again when they die, and a placed trainer."""
