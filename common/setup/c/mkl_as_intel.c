// Preloaded, it answers MKL's question whether this is an Intel processor with yes: MKL then takes AVX-512 on AMD's too.
int mkl_serv_intel_cpu_true(void) { return 1; }
