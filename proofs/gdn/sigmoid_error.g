# sigmoid(x) = 1 / (1 + exp(-x)): E the exact exponential, Ec the machine's; y the machine's reciprocal of d.
@fp32 = float<ieee_32, ne>;

d = fp32(1 + Ec);
exact = 1 / (1 + E);
inverse = 1 / d;

{ E in [1b-100, 1b100] /\ |Ec -/ E| <= <<devices.exp_relative>> /\ |y -/ inverse| <= <<devices.reciprocal_relative>>
  -> |d -/ (1 + E)| <= <<devices.exp_relative + 2 * devices.unit_roundoff>>
  /\ |y -/ exact| <= <<(devices.exp_relative + devices.reciprocal_relative + 2 * devices.unit_roundoff) * 1025 / 1024>> }

# 1 + Ec is no further from 1 + E, relatively, than Ec from E.
(1 + Ec - (1 + E)) / (1 + E) -> ((Ec - E) / E) * (1 / (1 + 1 / E)) { E <> 0, 1 + E <> 0, 1 + 1 / E <> 0 };
