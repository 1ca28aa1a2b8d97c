// The pool's workers by memory node: whose memory a worker is near to.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

namespace strata::cpu {

// Workers [first, first + size) of the pool.
struct Team {
    int index, first, size;
};

class Teams {
  public:
    // nodes: for each worker the number of its node; workers of a node stand together, and nodes are numbered
    // from 0 in the order in which they come. Empty: all are one team.
    Teams(const std::vector<int>& nodes, int workers) {
        if (nodes.empty()) {
            teams_.push_back({0, 0, workers});
            return;
        }
        if (nodes.size() != static_cast<size_t>(workers))
            throw std::invalid_argument(std::to_string(nodes.size()) + " nodes for " +
                                        std::to_string(workers) + " threads");
        for (int worker = 0; worker < workers; worker++) {
            if (nodes[worker] == count()) teams_.push_back({count(), worker, 0});
            if (nodes[worker] != count() - 1)
                throw std::invalid_argument("thread " + std::to_string(worker) + " is of node " +
                                            std::to_string(nodes[worker]) + " after node " +
                                            std::to_string(count() - 1));
            teams_.back().size++;
        }
    }

    int count() const { return static_cast<int>(teams_.size()); }
    int largest() const {
        int found = 0;
        for (const Team& team : teams_) found = team.size > found ? team.size : found;
        return found;
    }
    const Team& of(int worker) const {
        int index = 0;
        while (worker >= teams_[index].first + teams_[index].size) index++;
        return teams_[index];
    }

  private:
    std::vector<Team> teams_;
};

}  // namespace strata::cpu
