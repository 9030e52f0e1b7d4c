// What the page draws with, out of Apache ECharts. charts.min.js is made of it, by the command in charts.NOTICE.
import { init, connect, use } from "echarts/core";
import { LineChart, HeatmapChart } from "echarts/charts";
import { GridComponent, TooltipComponent, DataZoomComponent, VisualMapComponent } from "echarts/components";
import { CanvasRenderer } from "echarts/renderers";

use([LineChart, HeatmapChart, GridComponent, TooltipComponent, DataZoomComponent, VisualMapComponent, CanvasRenderer]);
export { init, connect };
