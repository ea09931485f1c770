"""What joins tpkernels to other libraries; each file needs its own."""
