#include "optim/lr_schedule.h"

#include <cmath>

#include "base/error.h"

namespace tessera::optim {
namespace {

constexpr double kPi = 3.14159265358979323846;

// 1 at progress 0, 0 at progress 1.
double decay(DecayType type, double progress) {
  switch (type) {
    case DecayType::kCosine:
      return 0.5 * (1.0 + std::cos(kPi * progress));
    case DecayType::kLinear:
      return 1.0 - progress;
  }
  throw InternalError("unknown DecayType");
}

}  // namespace

double LrSchedule::lr(int64_t step) const {
  validate();
  TESSERA_CHECK_CONFIG(step >= 0, "a learning rate was asked for step ", step,
                       "; steps are counted from 0.");
  if (step < warmup_steps) {
    return base_lr * (static_cast<double>(step + 1) / static_cast<double>(warmup_steps));
  }
  if (step >= total_steps) return base_lr * min_lr_factor;
  const int64_t decaying = decay_steps < 0 ? total_steps - warmup_steps : decay_steps;
  const int64_t decay_begin = total_steps - decaying;
  if (step < decay_begin) return base_lr;
  // Not 0 / 0: here decay_begin <= step < total_steps.
  const double progress = static_cast<double>(step - decay_begin) / static_cast<double>(decaying);
  return base_lr * (min_lr_factor + (1.0 - min_lr_factor) * decay(decay_type, progress));
}

void LrSchedule::validate() const {
  TESSERA_CHECK_CONFIG(std::isfinite(base_lr) && base_lr >= 0.0,
                       "base_lr must be finite and not negative, found ", base_lr, ".");
  TESSERA_CHECK_CONFIG(total_steps > 0, "total_steps must be positive, found ", total_steps,
                       ". Set it to the number of optimizer steps of the whole run.");
  TESSERA_CHECK_CONFIG(warmup_steps >= 0 && warmup_steps <= total_steps,
                       "warmup_steps must be between 0 and total_steps (", total_steps, "), found ",
                       warmup_steps, ".");
  TESSERA_CHECK_CONFIG(decay_steps >= -1 && decay_steps <= total_steps - warmup_steps,
                       "decay_steps must be -1 or between 0 and the steps after the warm-up (",
                       total_steps - warmup_steps, "), found ", decay_steps, ".");
  TESSERA_CHECK_CONFIG(min_lr_factor >= 0.0 && min_lr_factor <= 1.0,
                       "min_lr_factor must be between 0 and 1, found ", min_lr_factor, ".");
}

}  // namespace tessera::optim
