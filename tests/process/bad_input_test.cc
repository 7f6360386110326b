// Goal: what a user gets wrong ends the run at once, on all ranks, with a message that says what
// and the documented exit code; nothing hangs and no process is left. Method: the real program with
// one thing wrong at a time.

#include <gtest/gtest.h>

#include <array>
#include <filesystem>
#include <string>
#include <utility>

#include "tests/process/processes.h"

namespace tessera::process {
namespace {

namespace fs = std::filesystem;

constexpr int kUsageCode = 2;
constexpr int kCommCode = 3;

class BadInput : public Processes {
 protected:
  // Two ranks under the launcher: both must end by themselves, with the same code.
  void expect_refused(const Strings& options, const std::string& part) {
    const Outcome outcome = run(launch_command(2, options));
    EXPECT_EQ(outcome.code, kUsageCode) << outcome.err;
    EXPECT_SAYS(error_line(outcome.err), part);
    EXPECT_SAYS(outcome.err, "exited with code 2");
    EXPECT_EQ(outcome.out, "") << "it trained";
  }

  // Two ranks that no launcher ends early: each must say its own.
  std::array<Outcome, 2> run_pair(const Strings& first, const Strings& second) {
    const int64_t port = free_port();
    const auto rank1 = start(train_command(second), rank_environment(1, 2, port));
    const auto rank0 = start(train_command(first), rank_environment(0, 2, port));
    const std::array<Outcome, 2> outcomes = {rank0->wait(30), rank1->wait(30)};
    for (const Outcome& outcome : outcomes) {
      EXPECT_FALSE(outcome.was_late) << outcome.err;
      EXPECT_EQ(outcome.code, kUsageCode) << outcome.err;
    }
    expect_no_process_left();
    return outcomes;
  }

  // A copy of the data set, to be damaged.
  std::string copy_of_data() {
    const std::string copy = (folder() / "copy").string();
    fs::remove_all(copy);
    fs::copy(data(), copy);
    return copy;
  }
};

TEST_F(BadInput, MissingDatasetIsNamed) {
  const std::string missing = (folder() / "nowhere").string();
  expect_refused({"--training.dataset_path=" + missing},
                 "training.dataset_path '" + missing + "': no such file or folder");
  expect_refused({"--training.dataset_path="}, "training.dataset_path is not set");
  fs::create_directory(missing);
  expect_refused({"--training.dataset_path=" + missing}, "expected meta.json in it, found none");
}

TEST_F(BadInput, TruncatedTokenFileIsNamedWithBothSizes) {
  const fs::path file = fs::path(copy_of_data()) / "train.bin";
  const auto bytes = static_cast<int64_t>(fs::file_size(file));
  fs::resize_file(file, 5000);
  expect_refused({"--training.dataset_path=" + file.parent_path().string()},
                 "which is a file of " + std::to_string(bytes) + " bytes; found 5000 bytes");
}

TEST_F(BadInput, TokenFileWithAnotherMagicNumberIsNamed) {
  const fs::path file = fs::path(copy_of_data()) / "train.bin";
  std::string text = read_file(file);
  text[0] = static_cast<char>(text[0] ^ 1);
  write_file(file, text);
  expect_refused({"--training.dataset_path=" + file.parent_path().string()},
                 "token file " + file.string() + " starts with ");
}

TEST_F(BadInput, DamagedMetaFileIsNamed) {
  const fs::path file = fs::path(copy_of_data()) / "meta.json";
  write_file(file, read_file(file).substr(0, 20));
  expect_refused({"--training.dataset_path=" + file.parent_path().string()},
                 "'" + file.string() + "' is damaged");
}

TEST_F(BadInput, DatasetShorterThanASequenceIsNamed) {
  expect_refused({"--training.seq_len=1000000"}, "seq_len");
}

TEST_F(BadInput, UnknownKeyIsAnsweredWithTheNearest) {
  expect_refused({"--training.stepz=3"}, "Did you mean 'training.steps'?");
  expect_refused({"--trainin.steps=3"}, "Did you mean 'training'?");
  const std::string toml = (folder() / "run.toml").string();
  write_file(toml, "[optimizer]\nlearnrate = 1\n");
  expect_refused({toml}, toml + ":2");
}

TEST_F(BadInput, WrongTypeAndRangeAreAnsweredWithWhatIsAllowed) {
  expect_refused({"--training.steps=many"},
                 "training.steps: expected an integer >= 1, found 'many'");
  expect_refused({"--training.steps=0"}, "training.steps: expected an integer >= 1, found '0'");
  expect_refused({"--optimizer.beta1=1"}, "optimizer.beta1: expected ");
  expect_refused({"--parallelism.strategy=zero"}, "expected one of \"fsdp\", \"ddp\"");
}

TEST_F(BadInput, GlobalBatchSizeThatIsNoMultipleIsAnsweredWithTheProduct) {
  for (const std::string size : {"6", "2"}) {
    expect_refused({"--training.global_batch_size=" + size},
                   "training.global_batch_size = " + size +
                       ": expected a multiple of local_batch_size x ranks = 2 x 2 = 4");
  }
}

TEST_F(BadInput, DataWithMoreTokensThanTheModelIsRefused) {
  expect_refused({"--model.vocab_size=100"}, "smaller than the data's vocabulary of 257");
}

// A token file alone does not say how many different tokens it has: the first batch with one too
// many ends the run.
TEST_F(BadInput, TokenOutsideTheVocabularyIsFoundInTheBatch) {
  const Outcome outcome = run(launch_command(
      2, {"--training.dataset_path=" + data() + "/train.bin", "--model.vocab_size=100"}));
  EXPECT_EQ(outcome.code, kUsageCode) << outcome.err;
  EXPECT_SAYS(error_line(outcome.err), "100");
  EXPECT_SAYS(error_line(outcome.err), "token");
}

TEST_F(BadInput, DumpFolderThatIsAFileEndsAllRanks) {
  write_file(folder() / "a_file", "");
  const Strings options = {"--job.dump_folder=" + (folder() / "a_file").string()};
  const auto [first, second] = run_pair(options, options);
  EXPECT_SAYS(error_line(first.err), "[rank 0] cannot make the folder");
  EXPECT_SAYS(error_line(second.err), "[rank 1] rank 0 failed: cannot make the folder");
}

TEST_F(BadInput, FullDiskUnderTheMetricsEndsAllRanks) {
  fs::create_directory(dump_folder());
  fs::create_symlink("/dev/full", fs::path(dump_folder()) / "metrics.jsonl");
  const Strings options = {"--training.steps=100000"};
  const auto [first, second] = run_pair(options, options);
  EXPECT_SAYS(error_line(first.err), "[rank 0] cannot write the metrics to");
  EXPECT_SAYS(error_line(first.err), "No space left on device");
  EXPECT_SAYS(error_line(second.err), "[rank 1] rank 0 failed: cannot write the metrics to");
}

TEST_F(BadInput, HalfAnEnvironmentIsAnsweredWithWhatIsMissing) {
  const std::pair<Strings, const char*> cases[] = {
      {{"WORLD_SIZE=2", "RANK=0"}, "WORLD_SIZE=2 but MASTER_ADDR is not set"},
      {{"WORLD_SIZE=2"}, "environment variable RANK is not set"},
      {{"RANK=1"}, "environment variable WORLD_SIZE is not set"},
      {{"WORLD_SIZE=2", "RANK=0", "MASTER_ADDR=localhost"}, "environment variable MASTER_PORT is"},
      {{"WORLD_SIZE=2", "RANK=2", "MASTER_ADDR=localhost", "MASTER_PORT=29400"},
       "RANK=2: expected less than WORLD_SIZE=2"},
      {{"WORLD_SIZE=two", "RANK=0"}, "WORLD_SIZE='two': expected a whole number"},
  };
  for (const auto& [environment, part] : cases) {
    const Outcome outcome = run(train_command({}), environment);
    EXPECT_EQ(outcome.code, kUsageCode) << part;
    EXPECT_SAYS(error_line(outcome.err), part);
  }
}

TEST_F(BadInput, PortInUseIsNamedByLauncherAndByRankZero) {
  const Listener listener;
  const std::string port = std::to_string(listener.port());
  Outcome outcome = run(launch_command(2, {}, {"--master-port", port}));
  EXPECT_EQ(outcome.code, kUsageCode);
  EXPECT_SAYS(error_line(outcome.err), ":" + port + " is taken by another program");

  outcome = run(train_command({}), rank_environment(0, 2, listener.port()));
  EXPECT_EQ(outcome.code, kUsageCode);
  EXPECT_SAYS(error_line(outcome.err), ":" + port + ": the port is in use by another process");
}

TEST_F(BadInput, RanksWithDifferentConfigurationsAreToldTheKey) {
  for (const Outcome& outcome : run_pair({"--debug.seed=4"}, {"--debug.seed=5"})) {
    EXPECT_SAYS(error_line(outcome.err),
                "the ranks disagree on the configuration: rank 0 has 'seed = 4' where rank 1 has "
                "'seed = 5'");
  }
}

// A file that one rank sees and another does not: both end.
TEST_F(BadInput, DataThatOneRankLacksEndsAllRanks) {
  // The configuration is the same; the folders from which it is read differ.
  const int64_t port = free_port();
  const Strings options = {"--training.dataset_path=data"};
  const auto rank0 = start(train_command(options), rank_environment(0, 2, port), folder());
  fs::create_directory(folder() / "elsewhere");
  const auto rank1 =
      start(train_command(options), rank_environment(1, 2, port), folder() / "elsewhere");
  const Outcome first = rank0->wait(30);
  const Outcome second = rank1->wait(30);
  EXPECT_EQ(first.code, kUsageCode) << first.err;
  EXPECT_EQ(second.code, kUsageCode) << second.err;
  EXPECT_SAYS(error_line(first.err),
              "[rank 0] rank 1 failed: training.dataset_path 'data': no such file");
  EXPECT_SAYS(error_line(second.err), "[rank 1] training.dataset_path 'data': no such file");
  expect_no_process_left();
}

TEST_F(BadInput, AbsentRankIsNamedWhenTheTimeIsOver) {
  const Strings brief = {"--comm.init_timeout_seconds=2"};
  const auto first = start(train_command(brief), rank_environment(0, 2, free_port()));
  Outcome outcome = first->wait(15);
  EXPECT_FALSE(outcome.was_late);
  EXPECT_GE(outcome.seconds, 1.5);
  EXPECT_EQ(outcome.code, kCommCode) << outcome.err;
  EXPECT_SAYS(error_line(outcome.err), "not all of 2 ranks arrived within 2 s; missing: 1");
  EXPECT_TRUE(ends_with_a_stop(error_line(outcome.err))) << outcome.err;

  const auto second = start(train_command(brief), rank_environment(1, 2, free_port()));
  outcome = second->wait(15);
  EXPECT_FALSE(outcome.was_late);
  EXPECT_EQ(outcome.code, kCommCode) << outcome.err;
  EXPECT_SAYS(error_line(outcome.err), "no rank 0 answered at 127.0.0.1:");
  EXPECT_TRUE(ends_with_a_stop(error_line(outcome.err))) << outcome.err;
  expect_no_process_left();
}

}  // namespace
}  // namespace tessera::process
