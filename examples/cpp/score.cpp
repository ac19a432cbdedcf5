// Scores rows with a package of recsys.export, without Python: JSON lines in, JSON lines out, in order.
//
//   score FOLDER [THREADS] < rows.jsonl > scores.jsonl
//
// prepare.py makes FOLDER from a package. A row has the columns of `recsys predict`, with original ids:
//   {"user_id": 7, "request_time": 1650000000, "uih_item_id": [3, 4], ..., "candidate_item_id": [5, 6]}
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <deque>
#include <fstream>
#include <future>
#include <iostream>
#include <limits>
#include <memory>
#include <sstream>
#include <unordered_map>

#include "json.h"

using json::Value;
using Table = std::unordered_map<std::string, int64_t>;

constexpr size_t kRowsPerCall = 64;

// One input of the compiled program, and how it is made of a row's column.
struct Input {
  std::string kind, column, side;
  bool multi = false, required = true, log1p = false;
  double mean = 0, std = 1, fill = std::numeric_limits<double>::quiet_NaN();
  std::vector<double> boundaries;
  std::shared_ptr<const Table> table;
};

struct Model {
  std::vector<Input> inputs;
  std::vector<std::string> keys, outputs;
  std::string candidate;
  int64_t max_history, num_contextual, tokens_per_event;
  std::unique_ptr<torch::inductor::AOTIModelPackageLoader> program;
};

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error(path + ": cannot be read");
  return {std::istreambuf_iterator<char>(file), {}};
}

// A line of FOLDER/NAME.ids is "ROW\tID": the row of the embedding table of an original id. Row 0 means unknown.
std::shared_ptr<const Table> read_table(const std::string& path) {
  std::istringstream lines(read_file(path));
  auto table = std::make_shared<Table>();
  for (std::string line; std::getline(lines, line);) {
    const size_t tab = line.find('\t');
    table->emplace(line.substr(tab + 1), std::stoll(line.substr(0, tab)));
  }
  return table;
}

std::vector<std::string> texts(const Value& list) {
  std::vector<std::string> all;
  for (const Value& item : list.items) all.push_back(item.text);
  return all;
}

Model load(const std::string& folder, int threads) {
  const Value recipe = json::parse(read_file(folder + "/recipe.json"));
  std::unordered_map<std::string, std::shared_ptr<const Table>> tables;
  Model model;
  for (const Value& entry : recipe.at("inputs").items) {
    Input input;
    input.kind = entry.at("kind").text;
    if (const Value* value = entry.find("column")) input.column = value->text;
    if (const Value* value = entry.find("side")) input.side = value->text;
    if (const Value* value = entry.find("multi")) input.multi = value->is_true();
    if (const Value* value = entry.find("required")) input.required = value->is_true();
    if (const Value* value = entry.find("log1p")) input.log1p = value->is_true();
    if (const Value* value = entry.find("mean")) input.mean = value->number();
    if (const Value* value = entry.find("std")) input.std = value->number();
    if (const Value* value = entry.find("fill")) input.fill = value->number();
    if (const Value* value = entry.find("boundaries"))
      for (const Value& item : value->items) input.boundaries.push_back(item.number());
    if (const Value* value = entry.find("table")) {
      auto& table = tables[value->text];
      if (!table) table = read_table(folder + "/" + value->text + ".ids");
      input.table = table;
    }
    model.inputs.push_back(std::move(input));
  }
  model.keys = texts(recipe.at("keys"));
  model.outputs = texts(recipe.at("outputs"));
  model.candidate = recipe.at("candidate").text;
  model.max_history = recipe.at("max_history").integer();
  model.num_contextual = recipe.at("num_contextual").integer();
  model.tokens_per_event = recipe.at("tokens_per_event").integer();
  // As many runners as threads, so that no thread waits for the program.
  model.program = std::make_unique<torch::inductor::AOTIModelPackageLoader>(
      folder + "/model.pt2", "model", /*run_single_threaded=*/false, /*num_runners=*/threads);
  return model;
}

// The flat inputs of one call, and the number of candidates of each row.
struct Batch {
  std::vector<std::vector<int64_t>> integers;
  std::vector<std::vector<float>> reals;
  std::vector<int64_t> candidates;
  int64_t longest = 0;
};

double number_of(const Input& input, const Value& value) {
  const double x = value.kind == Value::Null ? input.fill : value.number();
  if (!std::isfinite(x)) throw std::runtime_error(input.column + ": null or not finite");
  return x;
}

void append_value(const Input& input, const Value& value, std::vector<int64_t>& integers, std::vector<float>& reals) {
  if (input.kind == "ids") {
    const auto place = input.table->find(value.text);
    integers.push_back(place == input.table->end() ? 0 : place->second);
  } else if (input.kind == "buckets") {
    const auto& edges = input.boundaries;
    integers.push_back(std::upper_bound(edges.begin(), edges.end(), number_of(input, value)) - edges.begin());
  } else if (input.kind == "integers") {
    integers.push_back(value.integer());
  } else {
    double x = number_of(input, value);
    if (input.log1p) x = std::copysign(std::log1p(std::abs(x)), x);
    reals.push_back(static_cast<float>((x - input.mean) / input.std));
  }
}

// Appends one input of a row. `length` is the number of events or candidates; `start` the first one that is kept.
void append(const Input& input, const Value& row, int64_t length, int64_t start, std::vector<int64_t>& integers,
            std::vector<float>& reals) {
  const Value* cell = row.find(input.column);
  if (cell == nullptr || (cell->kind == Value::Null && input.side != "user")) {
    if (input.required) throw std::runtime_error("no column " + input.column);
    // The model does not read it, or it defaults to the request's time.
    const bool is_time = input.kind == "integers" && input.side == "candidate";
    const int64_t value = is_time ? row.at("request_time").integer() : 0;
    if (input.kind == "integers") integers.insert(integers.end(), length - start, value);
    else reals.insert(reals.end(), length - start, 0.0f);
    return;
  }
  const std::vector<Value> single = input.side == "user" ? std::vector<Value>{*cell} : std::vector<Value>{};
  const std::vector<Value>& elements = input.side == "user" ? single : cell->items;
  if (input.side != "user" && (cell->kind != Value::Array || static_cast<int64_t>(elements.size()) != length))
    throw std::runtime_error(input.column + ": expected a list of " + std::to_string(length) + " values");
  for (size_t i = input.side == "user" ? 0 : start; i < elements.size(); ++i) {
    if (!input.multi) append_value(input, elements[i], integers, reals);
    else if (elements[i].kind != Value::Array) throw std::runtime_error(input.column + ": expected lists");
    else if (input.kind == "counts") integers.push_back(elements[i].items.size());
    else for (const Value& value : elements[i].items) append_value(input, value, integers, reals);
  }
}

int64_t length_of(const Value& row, const std::string& column) {
  const Value& cell = row.at(column);
  if (cell.kind != Value::Array) throw std::runtime_error(column + ": expected a list");
  return cell.items.size();
}

void append_row(const Model& model, const Value& row, Batch& batch) {
  const int64_t events = length_of(row, "uih_timestamps");
  const int64_t candidates = length_of(row, model.candidate);
  const int64_t kept = std::min(events, model.max_history);
  for (size_t i = 0; i < model.inputs.size(); ++i) {
    const Input& input = model.inputs[i];
    auto& integers = batch.integers[i];
    if (input.kind == "lengths") integers.push_back(input.side == "history" ? kept : candidates);
    else if (input.kind != "steps") {
      const bool is_history = input.side == "history";
      append(input, row, is_history ? events : candidates, is_history ? events - kept : 0, integers, batch.reals[i]);
    }
  }
  batch.candidates.push_back(candidates);
  const int64_t tokens = model.num_contextual + model.tokens_per_event * kept + candidates;
  batch.longest = std::max(batch.longest, tokens);
}

at::Tensor run(const Model& model, Batch& batch) {
  c10::InferenceMode guard;
  std::vector<at::Tensor> inputs;
  for (size_t i = 0; i < model.inputs.size(); ++i) {
    auto& integers = batch.integers[i];
    auto& reals = batch.reals[i];
    if (model.inputs[i].kind == "steps") {  // only its shape is read: the longest sequence, less two tokens
      inputs.push_back(at::arange(std::max<int64_t>(batch.longest - 2, 0), at::kLong));
    } else if (model.inputs[i].kind == "reals") {
      inputs.push_back(at::from_blob(reals.data(), {static_cast<int64_t>(reals.size())}, at::kFloat).clone());
    } else {  // a clone has the alignment that compiled code expects
      inputs.push_back(at::from_blob(integers.data(), {static_cast<int64_t>(integers.size())}, at::kLong).clone());
    }
  }
  return model.program->run(inputs).at(0).to(at::kFloat).contiguous();
}

std::string answer(const Model& model, const std::vector<std::string>& lines, size_t first_line) {
  Batch batch;
  batch.integers.resize(model.inputs.size());
  batch.reals.resize(model.inputs.size());
  std::vector<Value> rows;
  for (size_t i = 0; i < lines.size(); ++i) {
    try {
      rows.push_back(json::parse(lines[i]));
      append_row(model, rows.back(), batch);
    } catch (const std::exception& error) {
      throw std::runtime_error("line " + std::to_string(first_line + i) + ": " + error.what());
    }
  }
  int64_t total = 0;
  for (const int64_t count : batch.candidates) total += count;
  const at::Tensor scores = total > 0 ? run(model, batch) : at::Tensor();  // compiled code takes no empty batch
  const float* score = total > 0 ? scores.const_data_ptr<float>() : nullptr;
  const size_t tasks = model.outputs.size();
  std::ostringstream out;
  out.precision(9);
  for (size_t i = 0; i < rows.size(); ++i) {
    out << "{";
    for (const auto& key : model.keys)
      if (const Value* value = rows[i].find(key)) out << '"' << key << "\": " << value->raw << ", ";
    for (size_t task = 0; task < tasks; ++task) {
      out << (task ? ", \"" : "\"") << model.outputs[task] << "\": [";
      for (int64_t n = 0; n < batch.candidates[i]; ++n) out << (n ? ", " : "") << score[n * tasks + task];
      out << "]";
    }
    out << "}\n";
    score += batch.candidates[i] * tasks;
  }
  return out.str();
}

int main(int argc, char** argv) try {
  if (argc < 2) throw std::runtime_error("usage: score FOLDER [THREADS] < rows.jsonl");
  const size_t threads = argc > 2 ? std::max(1, std::atoi(argv[2])) : 1;
  setenv("AOTI_RUNTIME_CHECK_INPUTS", "1", 0);  // compiled code does not check its inputs otherwise
  at::set_num_threads(1);                       // one core a call: calls run side by side
  const Model model = load(argv[1], static_cast<int>(threads));
  std::deque<std::future<std::string>> running;
  std::vector<std::string> lines;
  size_t line_number = 0;
  const auto start = [&] {
    if (lines.empty()) return;
    const size_t first = line_number - lines.size() + 1;
    running.push_back(std::async(std::launch::async, [&model, first, block = std::move(lines)] {
      at::set_num_threads(1);
      return answer(model, block, first);
    }));
    lines.clear();
  };
  for (std::string line; std::getline(std::cin, line);) {
    ++line_number;
    lines.push_back(std::move(line));
    if (lines.size() < kRowsPerCall) continue;
    start();
    if (running.size() >= threads) {
      std::cout << running.front().get();
      running.pop_front();
    }
  }
  start();
  for (auto& block : running) std::cout << block.get();
  return 0;
} catch (const std::exception& error) {
  std::cerr << "error: " << error.what() << "\n";
  return 1;
}
