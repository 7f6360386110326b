#ifndef APPS_TRAIN_COMMAND_H_
#define APPS_TRAIN_COMMAND_H_

// `tessera train`, after its arguments have been read.

#include "apps/config.h"

namespace tessera::apps {

// Trains as the configuration says, as one of the ranks that the environment describes, and returns
// the exit code.
//
// Requires:   validate(config) has passed.
// Collective: called by every rank of the run with the same configuration.
// Errors:     the exceptions of base/error.h; main() turns them into message and exit code.
int run_train(const JobConfig& config);

}  // namespace tessera::apps

#endif  // APPS_TRAIN_COMMAND_H_
