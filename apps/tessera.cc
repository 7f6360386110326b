// The `tessera` program: reads the command line, calls the command, turns errors into message and
// exit code.

#include <fcntl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <iostream>
#include <new>
#include <sstream>
#include <string>
#include <vector>

#include "apps/config.h"
#include "apps/train_command.h"
#include "base/error.h"
#include "base/nearest.h"
#include "data/prepare.h"
#include "launch/launcher.h"

namespace tessera::apps {
namespace {

constexpr const char* kVersion = "tessera 0.1.0";

constexpr int kUsageCode = 2;
constexpr int kCommCode = launch::kPeerFailureCode;
constexpr int kInternalCode = 4;

constexpr const char* kMainFooter = R"(
Examples:
  tessera prepare --output runs/code --extensions .h,.cc src      text to tokens
  tessera train --training.dataset_path=runs/code                 train alone
  tessera launch --nproc-per-node 2 -- tessera train run.toml     train on 2 ranks of this machine
  tessera train --help                                            all configuration keys
)";

constexpr const char* kExitCodes = R"(
Exit codes:
  0  done
  2  wrong usage, configuration or input file
  3  another rank is gone, late or disagrees: look at the rank that failed first
  4  an error inside tessera or a library
  tessera launch returns the code of the rank that failed first; 128 + n for signal n, 127 for a
  program that is not found, 126 for one that cannot be executed.
)";

constexpr const char* kTrainFooter = R"(
The configuration is: the defaults below, then RUN.toml, then --section.key=value (or
--section.key value) from left to right. In a file:

  [training]
  dataset_path = "runs/code"
  steps = 200

Examples:
  tessera train run.toml
  tessera train run.toml --optimizer.lr=3e-4 --parallelism.strategy ddp
  tessera train --print-config > run.toml         a file with all keys, to be edited
  tessera launch --nproc-per-node 4 -- tessera train run.toml
  torchrun --no-python --nproc-per-node 4 tessera train run.toml

Configuration keys:
)";

constexpr const char* kPrepareFooter = R"(
Writes DIR/train.bin, DIR/val.bin (with --validation-fraction) and DIR/meta.json. A token is a
byte; a separator follows each document. A document is a file; folders are read with all below.

Example:
  tessera prepare --output runs/code --extensions .h,.cc --validation-fraction 0.05 src include
)";

constexpr const char* kLaunchFooter = R"(
PROGRAM sees torchrun's variables: RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and so on.
When a rank fails, the others are ended; nothing stays behind. All after PROGRAM is the program's.

Examples:
  tessera launch --nproc-per-node 2 -- tessera train run.toml
  tessera launch --nproc-per-node 4 --log-dir runs/logs ./my_trainer --epochs 3
)";

using Arguments = std::vector<std::string>;

bool starts_with(const std::string& text, const std::string& start) {
  return text.compare(0, start.size(), start) == 0;
}

// Moves --section.key overrides, with their values, from `arguments` to the result: CLI11 would
// take a value that stands alone for the file's name.
Arguments take_overrides(Arguments& arguments) {
  Arguments overrides;
  Arguments rest;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const std::string& argument = arguments[i];
    if (!starts_with(argument, "--") || argument == "--help" || argument == "--print-config") {
      rest.push_back(argument);
      continue;
    }
    overrides.push_back(argument);
    const bool value_follows = argument.find('=') == std::string::npos;
    if (value_follows && i + 1 < arguments.size()) overrides.push_back(arguments[++i]);
  }
  arguments = rest;
  return overrides;
}

// Moves the program and its arguments from `arguments` to the result: they begin after "--", or at
// the first argument that is neither an option of `launch` nor an option's value.
Arguments take_program(Arguments& arguments) {
  size_t at = 0;
  while (at < arguments.size() && starts_with(arguments[at], "-") && arguments[at] != "--") {
    const bool alone = arguments[at] == "--help" || arguments[at] == "-h" ||
                       arguments[at].find('=') != std::string::npos;
    at = std::min(arguments.size(), at + (alone ? 1 : 2));
  }
  const size_t begin = at < arguments.size() && arguments[at] == "--" ? at + 1 : at;
  Arguments program(arguments.begin() + static_cast<std::ptrdiff_t>(begin), arguments.end());
  arguments.resize(at);
  return program;
}

bool is_on_path(const std::string& name) {
  const char* path = std::getenv("PATH");
  std::istringstream folders(path == nullptr ? "" : path);
  for (std::string folder; std::getline(folders, folder, ':');) {
    const std::filesystem::path file = std::filesystem::path(folder) / name;
    if (::access(file.c_str(), X_OK) == 0 && !std::filesystem::is_directory(file)) return true;
  }
  return false;
}

// `tessera launch ... tessera train` works when tessera was started by its path, too.
void find_own_program(const std::string& argv0, std::string& program) {
  if (program != std::filesystem::path(argv0).filename() || is_on_path(program)) return;
  program = std::filesystem::read_symlink("/proc/self/exe").string();
}

Arguments split_commas(const std::string& text) {
  Arguments parts;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, ',');) {
    if (!part.empty()) parts.push_back(part);
  }
  return parts;
}

struct TrainArguments {
  std::string toml_path;
  Arguments overrides;
  bool print_config = false;
};

int train(const TrainArguments& arguments) {
  const JobConfig config = load_config(arguments.toml_path, arguments.overrides);
  if (arguments.print_config) {
    std::cout << print_config(config) << std::flush;
    validate(config);
    return 0;
  }
  validate(config);
  TESSERA_CHECK_CONFIG(!config.training.dataset_path.empty(),
                       "training.dataset_path is not set. Make a data folder with `tessera prepare "
                       "--output DIR PATH...` and give it with --training.dataset_path=DIR.");
  return run_train(config);
}

struct PrepareArguments {
  std::string output;
  std::string extensions;
  double validation_fraction = 0;
  Arguments paths;
};

int prepare(const PrepareArguments& arguments) {
  data::PrepareOptions options;
  options.extensions = split_commas(arguments.extensions);
  options.val_fraction = arguments.validation_fraction;
  const data::PrepareResult result = data::prepare(arguments.paths, arguments.output, options);
  std::cout << "training: " << result.train_tokens << " tokens of " << result.train_documents
            << " documents\n"
            << "validation: " << result.val_tokens << " tokens of " << result.val_documents
            << " documents\n"
            << "written to " << arguments.output << "\n"
            << std::flush;
  return 0;
}

CLI::App* add_train(CLI::App& app, TrainArguments& arguments) {
  CLI::App* train_app = app.add_subcommand("train", "Train a model");
  train_app->add_option("RUN.toml", arguments.toml_path, "configuration file");
  train_app->add_flag("--print-config", arguments.print_config,
                      "print the configuration as it results, and end");
  train_app->footer([] { return kTrainFooter + config_help(); });
  train_app->footer(kExitCodes);
  return train_app;
}

CLI::App* add_prepare(CLI::App& app, PrepareArguments& arguments) {
  CLI::App* prepare_app = app.add_subcommand("prepare", "Make token files from text");
  prepare_app->add_option("--output", arguments.output, "folder for the token files")
      ->type_name("DIR")
      ->required();
  prepare_app
      ->add_option("--extensions", arguments.extensions,
                   "take only these files of folders, as in .h,.cc")
      ->type_name("LIST");
  prepare_app
      ->add_option("--validation-fraction", arguments.validation_fraction,
                   "part of the documents set aside for validation, in [0, 1)")
      ->capture_default_str();
  prepare_app->add_option("PATH", arguments.paths, "files and folders")->required();
  prepare_app->footer(std::string(kPrepareFooter) + kExitCodes);
  return prepare_app;
}

CLI::App* add_launch(CLI::App& app, launch::LaunchOptions& options) {
  CLI::App* launch_app = app.add_subcommand(
      "launch", "Start ranks of a program on this machine: launch [OPTIONS] [--] PROGRAM ARGS...");
  launch_app->add_option("--nproc-per-node", options.nproc_per_node, "number of ranks")->required();
  launch_app
      ->add_option("--master-port", options.master_port,
                   "TCP port at which the ranks meet; 0: a free one")
      ->capture_default_str();
  launch_app
      ->add_option("--grace-seconds", options.grace_seconds,
                   "time from SIGTERM to SIGKILL when ranks are ended")
      ->capture_default_str();
  launch_app
      ->add_option("--log-dir", options.log_dir,
                   "write each rank's output to DIR/rank_00000.log and so on")
      ->type_name("DIR");
  launch_app->footer(std::string(kLaunchFooter) + kExitCodes);
  return launch_app;
}

// All of the command line; the commands' own errors come as exceptions.
int run(const std::string& argv0, Arguments arguments) {
  CLI::App app{"Trains models on many devices, replicated (DDP) or sharded (FSDP).", "tessera"};
  app.set_version_flag("--version", kVersion);
  app.require_subcommand(1);
  app.footer(std::string(kMainFooter) + kExitCodes);
  TrainArguments train_arguments;
  PrepareArguments prepare_arguments;
  launch::LaunchOptions launch_options;
  const CLI::App* train_app = add_train(app, train_arguments);
  const CLI::App* prepare_app = add_prepare(app, prepare_arguments);
  add_launch(app, launch_options);

  if (arguments.empty()) {
    std::cerr << app.help();
    return kUsageCode;
  }
  const std::string command = arguments[0];
  const Arguments commands = {"train", "prepare", "launch"};
  if (!starts_with(command, "-") &&
      std::find(commands.begin(), commands.end(), command) == commands.end()) {
    const std::string guess = base::nearest(command, commands);
    throw ConfigError(base::str("unknown command '", command,
                                "'; expected train, prepare or launch.",
                                guess.empty() ? "" : " Did you mean '" + guess + "'?"));
  }
  arguments.erase(arguments.begin());
  if (command == "train") train_arguments.overrides = take_overrides(arguments);
  if (command == "launch") launch_options.program = take_program(arguments);
  arguments.insert(arguments.begin(), command);
  try {
    std::reverse(arguments.begin(), arguments.end());  // CLI11 takes them from the back
    app.parse(arguments);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help, --version
    throw ConfigError(base::str(error.what(), " (see tessera --help)"));
  }
  if (train_app->parsed()) return train(train_arguments);
  if (prepare_app->parsed()) return prepare(prepare_arguments);
  TESSERA_CHECK_CONFIG(
      !launch_options.program.empty(),
      "no program to launch: tessera launch --nproc-per-node N -- PROGRAM ARGS...");
  find_own_program(argv0, launch_options.program[0]);
  return launch::launch(launch_options);
}

int report(const std::string& message, int exit_code) {
  std::string line = "tessera: error: ";
  const char* rank = std::getenv("RANK");  // of a launched rank: several may report at once
  if (rank != nullptr) line += base::str("[rank ", rank, "] ");
  line += message;
  line += '\n';
  std::cerr << line << std::flush;  // std::cerr is unbuffered: one write
  return exit_code;
}

// The one place where errors become messages and exit codes.
int report_current_exception() {
  try {
    throw;
  } catch (const ConfigError& error) {
    return report(error.what(), kUsageCode);
  } catch (const CheckpointError& error) {
    return report(error.what(), kUsageCode);
  } catch (const CommError& error) {
    return report(error.what(), kCommCode);
  } catch (const std::bad_alloc&) {
    return report("out of memory", kInternalCode);
  } catch (const std::exception& error) {
    return report(error.what(), kInternalCode);
  }
}

}  // namespace
}  // namespace tessera::apps

int main(int argc, char** argv) {
  // Where a standard stream is closed, the next file that is opened would take its place, and its lines.
  for (int fd = 0; fd <= 2; ++fd) {
    if (::fcntl(fd, F_GETFD) == -1) ::open("/dev/null", O_RDWR);
  }
  try {
    return tessera::apps::run(argv[0], tessera::apps::Arguments(argv + 1, argv + argc));
  } catch (...) {
    return tessera::apps::report_current_exception();
  }
}
