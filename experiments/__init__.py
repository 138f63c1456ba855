"""What a user runs: the commands are at the top, the experiments in studies/ (one file each, and one YAML in conf/experiment)."""
