#ifndef OPTIM_LR_SCHEDULE_H_
#define OPTIM_LR_SCHEDULE_H_

// The learning rate as a pure function of the step: nothing to advance, nothing to save. A resumed
// run asks for the rate of its step and has the rate of the run it continues:
//
//   adamw.set_lr(schedule.lr(step));  adamw.step();
//
//   lr
//   peak |      .-----.            warm-up    step 0 already trains, at peak / warmup_steps; the
//        |    /        `.                     last warm-up step, warmup_steps - 1, is at the peak
//        |  /            `.         constant  until total_steps - decay_steps
//   min  |/                `-----   decay     to the minimum at step total_steps
//        +------------------------  after     stays at the minimum
//                            step
//
// C++ only: no torch.

#include <cstdint>

namespace tessera::optim {

enum class DecayType {
  kCosine,  // half a period of the cosine
  kLinear,
};

struct LrSchedule {
  double base_lr = 1e-3;  // the peak
  int64_t warmup_steps = 0;
  int64_t total_steps = 0;   // steps of the whole run, warm-up included; must be set
  int64_t decay_steps = -1;  // the last ones; -1: all after the warm-up
  DecayType decay_type = DecayType::kCosine;
  double min_lr_factor = 0.0;  // the minimum as a part of the peak

  // The rate of a step, counted from 0.
  //
  // Ensures: between 0 and base_lr; base_lr * min_lr_factor from total_steps on.
  // Errors:  ConfigError where a field or the step is out of its range.
  double lr(int64_t step) const;

  // Errors: ConfigError that names the field. lr() calls it; call it early to fail before the first
  //         step.
  void validate() const;
};

}  // namespace tessera::optim

#endif  // OPTIM_LR_SCHEDULE_H_
