// Regions, tables, argument checks and the progress of a transfer: the same for every backend.
#include "copier.h"

#include <algorithm>
#include <limits>
#include <map>
#include <sstream>

namespace xllm {
namespace {

template <class... Args>
std::string text(const Args&... args) {
  std::ostringstream out;
  (out << ... << args);
  return out.str();
}

const char* name(Kind kind) { return kind == Kind::kHost ? "host" : "device"; }

// Bytes from block 0 to the end of the last block's piece; throws when that does not fit an address.
std::size_t extent(std::int64_t blocks, std::size_t stride, std::size_t piece, const char* side) {
  if (blocks < 1) throw std::invalid_argument(text("a table needs at least one ", side, " block, not ", blocks));
  if (stride < piece) {
    throw std::invalid_argument(text(side, " blocks of stride ", stride, " overlap: one piece has ", piece, " bytes"));
  }
  if (static_cast<std::size_t>(blocks) > std::numeric_limits<std::ptrdiff_t>::max() / stride) {
    throw std::invalid_argument(text(blocks, " ", side, " blocks of ", stride, " bytes exceed the address space"));
  }
  return static_cast<std::size_t>(blocks - 1) * stride + piece;
}

void check_ids(const std::vector<std::int64_t>& ids, std::int64_t blocks, const char* side) {
  for (const std::int64_t id : ids) {
    if (id < 0 || id >= blocks) {
      throw std::invalid_argument(text(side, " block ", id, " is out of range: the table has ", blocks));
    }
  }
}

}  // namespace

// ------------------------------------------------------------------------------------------------------ Transfer

Transfer::Transfer(Request given) : request(std::move(given)), groups_(request.groups.size()) {
  const bool load = request.direction == Direction::kLoad;
  for (const auto& [first, end] : request.groups) {
    std::vector<Run>& out = runs.emplace_back();
    for (const Part& part : request.parts) {
      const Table& table = *part.table;
      const auto begin = std::lower_bound(table.layers.begin(), table.layers.end(), first);
      for (auto layer = begin; layer != table.layers.end() && *layer < end; ++layer) {
        const auto row = static_cast<std::size_t>(layer - table.layers.begin());
        const Address device = table.device_bases[row], host = table.host_base + table.host_offsets[row];
        const std::size_t count = part.device_ids.size();
        if (load) {
          out.push_back({host, device, table.host_stride, table.device_stride, table.piece_bytes, part.host_ids.data(),
                         part.device_ids.data(), count, pieces});
        } else {
          out.push_back({device, host, table.device_stride, table.host_stride, table.piece_bytes,
                         part.device_ids.data(), part.host_ids.data(), count, pieces});
        }
        pieces += static_cast<std::int64_t>(count);
        bytes += count * table.piece_bytes;
      }
    }
  }
  for (const Part& part : request.parts) {
    for (const auto& region : part.table->regions) ++region->users;
  }
}

Transfer::~Transfer() { cancel(); }

void Transfer::start() {
  std::lock_guard lock(mutex_);
  started_ = true;
  groups_left_ = static_cast<std::size_t>(
      std::count_if(groups_.begin(), groups_.end(), [](const Group& group) { return group.left != 0; }));
  end_if_over_locked();
}

void Transfer::end_if_over_locked() {
  if (ended_ || running_ != 0 || !(stop_ || (started_ && groups_left_ == 0))) return;
  ended_ = true;
  for (const Part& part : request.parts) {
    for (const auto& region : part.table->regions) --region->users;
  }
  changed_.notify_all();
}

bool Transfer::begin() {
  std::lock_guard lock(mutex_);
  if (stop_) return false;
  ++running_;
  return true;
}

void Transfer::finish(std::size_t group, bool copied) {
  std::lock_guard lock(mutex_);
  --running_;
  if (copied && --groups_[group].left == 0) {
    --groups_left_;
    groups_[group].event = nullptr;
    changed_.notify_all();
  }
  end_if_over_locked();
}

void Transfer::fail(std::size_t group, std::exception_ptr error) {
  {
    std::lock_guard lock(mutex_);
    if (!error_) error_ = std::move(error);
    stop_ = true;
    groups_[group].event = nullptr;
  }
  finish(group, false);
}

void Transfer::cancel() {
  std::lock_guard lock(mutex_);
  if (ended_ || stop_) return;
  error_ = std::make_exception_ptr(TransferCancelled("the transfer was cancelled"));
  stop_ = true;
  end_if_over_locked();
}

void Transfer::recorded(std::size_t group, void* event) {
  std::lock_guard lock(mutex_);
  groups_[group].event = event;
  changed_.notify_all();
}

void Transfer::rethrow_locked() const {
  if (error_) std::rethrow_exception(error_);
}

bool Transfer::wait_group(std::size_t group, Clock::time_point deadline) {
  std::unique_lock lock(mutex_);
  const Group& entry = groups_.at(group);
  // A group that arrived does not count once the transfer has failed: the caller must hear of it.
  if (!changed_.wait_until(lock, deadline, [&] { return ended_ || (!stop_ && entry.left == 0); })) return false;
  rethrow_locked();
  return true;
}

bool Transfer::wait_all(Clock::time_point deadline) {
  if (!wait_ended(deadline)) return false;
  std::lock_guard lock(mutex_);
  rethrow_locked();
  return true;
}

bool Transfer::wait_ended(Clock::time_point deadline) {
  std::unique_lock lock(mutex_);
  return changed_.wait_until(lock, deadline, [&] { return ended_; });
}

bool Transfer::done(std::size_t group) {
  std::lock_guard lock(mutex_);
  return groups_.at(group).left == 0;
}

bool Transfer::ended() {
  std::lock_guard lock(mutex_);
  return ended_;
}

std::exception_ptr Transfer::error() {
  std::lock_guard lock(mutex_);
  return ended_ ? error_ : nullptr;
}

void Transfer::inject_error(std::int64_t first_piece, std::size_t count) const {
  const std::int64_t at = request.fail_at_piece;
  if (at >= first_piece && at < first_piece + static_cast<std::int64_t>(count)) {
    throw NativeError(text("injected error at piece ", at));
  }
}

// -------------------------------------------------------------------------------------------------------- Copier

std::shared_ptr<Region> Copier::register_region(Address begin, std::size_t bytes, Kind kind) {
  if (begin == 0 || bytes == 0) throw std::invalid_argument("a region needs an address and a size above 0");
  if (bytes > static_cast<std::size_t>(std::numeric_limits<std::ptrdiff_t>::max()) || begin + bytes < begin) {
    throw std::invalid_argument(text("a region of ", bytes, " bytes exceeds the address space"));
  }
  std::lock_guard lock(mutex_);
  if (closed_) throw NativeError("the copier is closed");
  for (const auto& other : regions_) {
    if (begin < other->begin + other->bytes && other->begin < begin + bytes) {
      throw std::invalid_argument(text("the region at ", begin, " overlaps a registered ", name(other->kind),
                                       " region of ", other->bytes, " bytes at ", other->begin));
    }
  }
  auto region = std::make_shared<Region>();
  region->begin = begin;
  region->bytes = bytes;
  region->kind = kind;
  if (kind == Kind::kHost) region->pinned = pin(*region);
  regions_.push_back(region);
  return region;
}

void Copier::unregister_region(Region& region) {
  std::lock_guard lock(mutex_);
  if (!region.live) return;
  if (region.users != 0) throw NativeError("the region is in use by a transfer: wait for it, or cancel and wait");
  if (region.pinned) unpin(region);
  region.live = false;
  regions_.erase(std::remove_if(regions_.begin(), regions_.end(), [&](auto& each) { return each.get() == &region; }),
                 regions_.end());
}

std::shared_ptr<Region> Copier::find_locked(Address first, std::size_t size, Kind kind) const {
  for (const auto& region : regions_) {
    if (region->kind == kind && region->covers(first, size)) return region;
  }
  throw std::invalid_argument(
      text(size, " bytes at ", first, " do not lie within a registered ", name(kind), " region"));
}

std::shared_ptr<Table> Copier::table(TableSpec spec) {
  const std::size_t rows = spec.device_bases.size();
  if (rows == 0) throw std::invalid_argument("a table needs at least one layer");
  if (spec.host_offsets.size() != rows || spec.layers.size() != rows) {
    throw std::invalid_argument(text("a table of ", rows, " layers got ", spec.host_offsets.size(),
                                     " host offsets and ", spec.layers.size(), " layer numbers"));
  }
  if (spec.piece_bytes == 0) throw std::invalid_argument("a piece of 0 bytes");
  for (std::size_t row = 0; row < rows; ++row) {
    if (spec.layers[row] < 0 || (row > 0 && spec.layers[row] <= spec.layers[row - 1])) {
      throw std::invalid_argument("layer numbers must rise and start at 0 or above");
    }
    if (spec.host_offsets[row] > spec.host_stride || spec.host_stride - spec.host_offsets[row] < spec.piece_bytes) {
      throw std::invalid_argument(text("the piece of layer ", spec.layers[row], " ends outside its host block"));
    }
  }
  const std::size_t device_extent = extent(spec.device_blocks, spec.device_stride, spec.piece_bytes, "device");
  const std::size_t host_extent = extent(spec.host_blocks, spec.host_stride, spec.piece_bytes, "host");
  auto result = std::make_shared<Table>(std::move(spec));
  std::lock_guard lock(mutex_);
  const auto use = [&](std::shared_ptr<Region> region) {
    auto& list = result->regions;
    if (std::find(list.begin(), list.end(), region) == list.end()) list.push_back(std::move(region));
  };
  for (std::size_t row = 0; row < rows; ++row) {
    use(find_locked(result->device_bases[row], device_extent, Kind::kDevice));
    use(find_locked(result->host_base + result->host_offsets[row], host_extent, Kind::kHost));
  }
  return result;
}

void Copier::check(const Request& request) const {
  if (request.parts.empty() || request.groups.empty()) {
    throw std::invalid_argument("a transfer needs at least one part and one layer group");
  }
  int previous = 0;
  for (const auto& [first, end] : request.groups) {
    if (first < previous || end <= first) {
      throw std::invalid_argument(text("layer group (", first, ", ", end, ") is empty or out of order"));
    }
    previous = end;
  }
  // Two copies into one block would race, and whichever came last would win.
  std::map<const Table*, std::vector<bool>> targets;
  for (const Part& part : request.parts) {
    const Table& table = *part.table;
    for (const auto& region : table.regions) {
      const bool ours = std::find(regions_.begin(), regions_.end(), region) != regions_.end();
      if (!ours) throw std::invalid_argument("a region of the table is not registered with this copier (any more)");
    }
    if (part.device_ids.size() != part.host_ids.size() || part.device_ids.empty()) {
      throw std::invalid_argument(text("a part needs as many device as host blocks, and at least one: got ",
                                       part.device_ids.size(), " and ", part.host_ids.size()));
    }
    check_ids(part.device_ids, table.device_blocks, "device");
    check_ids(part.host_ids, table.host_blocks, "host");
    const bool load = request.direction == Direction::kLoad;
    std::vector<bool>& taken = targets[&table];
    taken.resize(static_cast<std::size_t>(load ? table.device_blocks : table.host_blocks));
    for (const std::int64_t id : load ? part.device_ids : part.host_ids) {
      if (taken[static_cast<std::size_t>(id)]) {
        throw std::invalid_argument(text("block ", id, " is the target of two copies"));
      }
      taken[static_cast<std::size_t>(id)] = true;
    }
  }
}

std::shared_ptr<Transfer> Copier::submit(Request request) {
  std::shared_ptr<Transfer> transfer;
  {
    std::lock_guard lock(mutex_);
    if (closed_) throw NativeError("the copier is closed");
    check(request);
    transfer = std::make_shared<Transfer>(std::move(request));  // from here on its regions are in use
  }
  start(transfer);
  return transfer;
}

void Copier::close() {
  {
    std::lock_guard lock(mutex_);
    if (closed_) return;
    closed_ = true;
  }
  stop();
  std::lock_guard lock(mutex_);
  for (const auto& region : regions_) {
    if (region->pinned) unpin(*region);
    region->live = false;
  }
  regions_.clear();
  release();
}

}  // namespace xllm
