# x rsqrt(s): s the exact sum of squares, sc the machine's with the relative error of 257 roundings at most (head_dim
# up to 256, eps included), rc the machine's reciprocal root of it, y the product rounded.
@fp32 = float<ieee_32, ne>;

x = fp32(x_);
root = 1 / sqrt(s);
machine = 1 / sqrt(sc);
exact = x * root;
y = fp32(x * rc);

{ x in [1b-40, 1b40] /\ s in [1b-60, 1b60] /\ |sc -/ s| <= <<257 * devices.unit_roundoff * 1025 / 1024>>
  /\ |rc -/ machine| <= <<devices.rsqrt_relative>>
  -> |y -/ exact| <= <<(257 * devices.unit_roundoff / 2 + devices.rsqrt_relative + 2 * devices.unit_roundoff) * 1025 / 1024>> }
