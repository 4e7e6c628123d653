# silu(x) = 0.5 x (1 + tanh(x / 2)), x / 2 exact; t is the exact tanh, tc the machine's.
@fp32 = float<ieee_32, ne>;

x = fp32(x_);
tc = t * (1 + e) + a;
s = fp32(1 + fp32(tc));
y = fp32((0.5 * x) * s);
exact = (0.5 * x) * (1 + t);

{ x in [-1b7, 1b7] /\ t in [-1, 1] /\ |e| <= <<devices.tanh_relative>> /\ |a| <= <<devices.tanh_absolute>>
  -> |s - (1 + t)| <= <<devices.tanh_relative + 4 * devices.unit_roundoff>>
  /\ |y - exact| <= <<2**6 * (devices.tanh_relative + 8 * devices.unit_roundoff)>> }

tc - t -> t * e + a;
