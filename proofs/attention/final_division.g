# The relative error of h = fl(o q) against r = o (0.5 / l), where nothing underflows: z = o q, and q is 0.5 / l with
# the error of a reciprocal.  The contract charges twice as much.  Positive results; rounding is symmetric.
@fp32 = float<ieee_32, ne>;

h = fp32(z);

{ r in [1b-124, 1b126] /\ |z -/ r| <= <<devices.reciprocal_relative>>
  -> |h -/ r| <= <<devices.reciprocal_relative + 2 * devices.unit_roundoff>> }
