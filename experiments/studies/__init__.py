"""The studies. Each file registers one experiment, under the name of its YAML in conf/experiment; none imports another."""
