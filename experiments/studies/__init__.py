"""The experiments. Each file registers one under the name of its YAML in conf/experiment; none imports another."""
