# softplus(x) = max(x, 0) + log1p(exp(-|x|)): L is the exact log1p, in [0, ln 2]; Lc the machine's, of its own
# exponential, which moves log1p by at most the exponential's relative error.
@fp32 = float<ieee_32, ne>;

m = fp32(m_);
y = fp32(m + fp32(Lc));
exact = m + L;

{ m in [0, 1b7] /\ L in [0, 0.6931472]
  /\ |Lc - L| <= <<devices.exp_relative + devices.log_relative + devices.log_absolute>>
  -> |y - exact| <= <<devices.exp_relative + devices.log_relative + devices.log_absolute + 2**7 * 2 * devices.unit_roundoff>> }
