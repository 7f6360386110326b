#ifndef TRAIN_TRAINER_H_
#define TRAIN_TRAINER_H_

// The Trainer runs the steps of a training: a window of micro-batches forward and backward, the
// checks that all ranks must share, clipping, the update, the report. It knows neither the model
// nor the strategy.
//
// Of each step all ranks agree on two things before anything is changed: that every rank has its
// batches, and that no rank's loss and no gradient is NaN or infinite. A fault on one rank ends the
// step on all of them, with the rank named.
//
// Collectives: three small ones a step, four where it reports, on the host group, beside those of
//              the model.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>

#include "comm/world.h"
#include "data/loader.h"
#include "optim/lr_schedule.h"
#include "train/metrics.h"
#include "train/parallelize.h"

namespace tessera::train {

struct TrainerOptions {
  int64_t steps = 0;
  int64_t micro_batches = 1;  // per step and rank
  double max_norm = 1.0;
  int64_t log_freq = 10;  // steps between two reports; the first and the last step are reported too
  optim::LrSchedule lr_schedule;
  double flops_per_token = 0;
  double peak_flops = 0;  // of one rank's device; 0: unknown
};

class Trainer {
 public:
  // The mean loss of a batch, with its graph.
  using Loss = std::function<at::Tensor(const data::Batch&)>;
  // Sets the rate, updates the parameters and drops the gradients.
  using Update = std::function<void(double lr)>;
  // Gets the metrics of a step; called on every rank, they are the same on each but for memory and
  // times.
  using Report = std::function<void(const StepMetrics&)>;

  Trainer(comm::World world, Parallel& parallel, data::Loader& loader, Loss loss, Update update,
          Report report, TrainerOptions options);

  // Trains options.steps steps and returns the last step's mean loss.
  //
  // Collective: yes.
  // Errors:     ConfigError on all ranks for bad data or a loss that is not finite; CommError when
  //             a peer is gone.
  double run();

 private:
  std::vector<data::Batch> fetch();
  double window(const std::vector<data::Batch>& batches);
  double mean_over_ranks(int64_t step, double loss);
  void report(int64_t step, double loss, double norm, double lr);

  comm::World world_;
  Parallel& parallel_;
  data::Loader& loader_;
  Loss loss_;
  Update update_;
  Report report_;
  TrainerOptions options_;

  // Since the last report.
  int64_t steps_ = 0;
  int64_t tokens_ = 0;  // of this rank
  double seconds_ = 0;
  double data_seconds_ = 0;
  int64_t tokens_seen_ = 0;  // of all ranks, since the start
};

}  // namespace tessera::train

#endif  // TRAIN_TRAINER_H_
